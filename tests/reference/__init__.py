"""Code that the methods' plain-NumPy references share: networks, local training and averages.

The references themselves, written from the papers, are in `methods.cases`: loops over clients, hand-written
gradients, double precision, no keys and no padding; whatever is random comes in as arrays. Words:

    weights   {"block/.../leaf": array}, the names and shapes that jaxfl uses; BatchNorm's running statistics
              are "stats/block/.../leaf"
    clients   list of `training.Client`; `client.group` is its architecture
    initial   list of weights, one per architecture
    cohort    `training.Cohort`: the clients of a round, each with what it draws
    draws     the same for all clients, where predicting needs training
    options   anything with the method's options as attributes
    state     dict of dicts, of new arrays in every round
"""
