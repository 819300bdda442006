"""Every method once more, in plain NumPy and double precision, to check jaxfl against.

The references are written from the papers, with loops over clients, hand-written gradients, no keys
and no padding: whatever is random comes in as arrays. Each method is a module of three functions:

    start(clients, initial)                    -> state
    step(state, clients, cohort, options)      -> state, {client: mean training loss}
    scores(state, clients, draws, options, x)  -> {"received": [...], "deployed": [...]}, logits per
                                                  client before and after its personalisation

Words used throughout:

    weights   {"block/.../leaf": array}, the names and shapes that jaxfl uses
    clients   list of `training.Client`; `client.group` is its architecture
    initial   list of weights, one per architecture
    cohort    `training.Cohort`: who takes part in a round, each with what it draws
    draws     the same for all clients, where predicting needs fine-tuning
    options   anything with the method's options as attributes
    state     dict of dicts, of new arrays in every round
"""
