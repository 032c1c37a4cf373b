"""ReplaySSM: decode steps of state-space layers that keep a checkpoint and a ring of inputs."""

from ._cursors import (
    commit_gdn_replayssm_spec,
    commit_replayssm_spec,
    reset_gdn_replayssm_spec_cursors,
    reset_replayssm_spec_cursors,
)
from ._library import has_cuda, version
from .recurrent import Cursors, Recurrence, State
from .gated_delta import fused_recurrent_gated_delta_rule_replayssm, gdn_replayssm_spec_decode
from .mamba2 import (
    selective_state_update_replayssm_output_only,
    selective_state_update_replayssm_spec,
    selective_state_update_replayssm_state_and_output,
)

__version__ = version()

__all__ = [
    "Cursors",
    "Recurrence",
    "State",
    "commit_gdn_replayssm_spec",
    "commit_replayssm_spec",
    "fused_recurrent_gated_delta_rule_replayssm",
    "gdn_replayssm_spec_decode",
    "has_cuda",
    "reset_gdn_replayssm_spec_cursors",
    "reset_replayssm_spec_cursors",
    "selective_state_update_replayssm_output_only",
    "selective_state_update_replayssm_spec",
    "selective_state_update_replayssm_state_and_output",
]
