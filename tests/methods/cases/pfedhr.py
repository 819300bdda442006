"""pFedHR (Wang et al. 2023, NeurIPS): a client's round, which is that of pFedClub.

`test_pfedclub` tests how the server assembles teachers, `test_reassembly` its candidates.
"""

from methods.cases.pfedclub import pfedclub as of_pfedclub

pfedhr = of_pfedclub._replace(method="pfedhr", comparisons={}, reductions=())
