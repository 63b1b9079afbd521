"""EaModel in plain PyTorch: targets from transformers, draft heads of EAGLE-1, EAGLE-2 and EAGLE-3."""

from .ea_model import EaModel
from .heads import DraftConfig, Eagle1Head, Eagle3Head
from .tree import MC_SIM_7B_63

__all__ = ["MC_SIM_7B_63", "DraftConfig", "EaModel", "Eagle1Head", "Eagle3Head"]
