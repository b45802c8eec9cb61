"""What policies are, and how one is carried out."""

from shardwise.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from shardwise.shardformer.policies.translation import PolicyArchitecture

__all__ = ["ModulePolicyDescription", "Policy", "PolicyArchitecture", "SubModuleReplacementDescription"]
