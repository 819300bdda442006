"""What pFedClub's server does between rounds, in plain NumPy: from activations and logits to a teacher.

Wang et al. 2024, "Controllable Heterogeneous Model Aggregation for Personalized Federated Learning"
(NeurIPS), section 3.2. Nothing here knows weights: blocks are references, a candidate is a tuple of them.

    activations -> `signatures` -> similarity (eq. 1) -> `grouping` -> `cmsr` -> candidates (`blocks`)
    logits of a client's model and of its stitched candidates -> `matching` (eq. 4) -> the teacher
"""
