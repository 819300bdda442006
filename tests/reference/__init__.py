"""What the methods' references in plain NumPy share, in double precision: networks, local training, averages.

The references themselves, written from the papers, stand in `methods.cases`: loops over clients,
hand-written gradients, no keys and no padding; whatever is random comes in as arrays. Words used throughout:

    weights   {"block/.../leaf": array}, the names and shapes that jaxfl uses; BatchNorm's running statistics
              are "stats/block/.../leaf"
    clients   list of `training.Client`; `client.group` is its architecture
    initial   list of weights, one per architecture
    cohort    `training.Cohort`: who takes part in a round, each with what it draws
    draws     the same for all clients, where predicting needs training
    options   anything with the method's options as attributes
    state     dict of dicts, of new arrays in every round
"""
