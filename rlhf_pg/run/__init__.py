"""What a run of any algorithm does: the objective that its updates follow."""

from rlhf_pg.run.objective import Objective as Objective, Term as Term
