"""The wire: what happens to a message between a client's training and the server's mean.

    client i    trains, its rows' gradients clipped, with noise                   `privacy`, rows
                d_i = what it sends - what the server knows of it already         such as w_i - w
                d_i <- clipped, with noise                                        `privacy`, where=client
                d_i <- a lie about the d_i before, if i is an attacker           `attacks`
                d_i <- fewer bits; what is lost is sent later, on request         `compression`
    server      d_i <- clipped                                                    `privacy`, norm-bound
                mean_i d_i, with noise                                            `privacy`, where=server
                or what it trusts more than a mean                                `aggregation`

`setup` makes a `Wire` of a run's options. It travels with the federation, so no method knows of it. A
mechanism calls `sent` for a message of one client, or `averaged` in place of `map_and_sum`; both do nothing
more where the federation has no wire. What a method passes through is `Algorithm.wire`.
"""

from jaxfl.mechanisms.wire.accounting import of_rows
from jaxfl.mechanisms.wire.messages import (
    Aggregated,
    averaged,
    first_clip,
    heard,
    nothing_owed,
    require_no_noise,
    sent,
    units,
    up,
    up_to,
    without,
)
from jaxfl.mechanisms.wire.setup import WITHOUT, accounting_of, chosen_of, needed_of, wire_of
