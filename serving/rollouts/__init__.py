"""Rollouts: samples of prompts for training, in arrays, while the weights change."""

from jaxshare.serving.rollouts.batch import RolloutBatch, pack
from jaxshare.serving.rollouts.ray_rollouts import RayRollouts
from jaxshare.serving.rollouts.sampling import rollout
from jaxshare.serving.rollouts.updates import UpdateError, update_engines

__all__ = ["RayRollouts", "RolloutBatch", "UpdateError", "pack", "rollout", "update_engines"]
