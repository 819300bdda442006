"""pFedHR (Wang et al. 2023, NeurIPS): a client's round, which is that of pFedClub.

How the server assembles teachers is tested in `test_pfedclub`, its candidates in `test_reassembly`.
"""

from methods.cases.pfedclub import pfedclub as of_pfedclub

pfedhr = of_pfedclub._replace(method="pfedhr", comparisons={}, reductions=())
