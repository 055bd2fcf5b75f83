"""What context parallelism would do: each rank's steps, the bytes they send, and an estimate of the time."""

from attnsel.cp_plan.cost import Estimate, Machine
from attnsel.cp_plan.plan import Exchange, Plan, plan

__all__ = ["Estimate", "Exchange", "Machine", "Plan", "plan"]
