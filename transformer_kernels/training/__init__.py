"""Training: `Trainer(CharGPT(CharGPTConfig(steps=200))).fit()`."""

from transformer_kernels.pretrained.generation import Sampling, generate, generate_many
from transformer_kernels.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    RunFolderError,
    load_checkpoint,
    load_trained,
    save_checkpoint,
)
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.data.files import DataFileError
from transformer_kernels.training.distributed import (
    Interrupted,
    Processes,
    ProcessLost,
    TrainingDiverged,
    joined_processes,
)
from transformer_kernels.training.loop.trainer import Result, Trainer
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.training.recipes.imdb import Imdb, ImdbConfig

__all__ = [
    "CharGPT",
    "CharGPTConfig",
    "Checkpoint",
    "CheckpointError",
    "DataFileError",
    "Imdb",
    "ImdbConfig",
    "Interrupted",
    "ProcessLost",
    "Processes",
    "Result",
    "RunFolderError",
    "Sampling",
    "Trainer",
    "TrainingConfig",
    "TrainingDiverged",
    "generate",
    "generate_many",
    "joined_processes",
    "load_checkpoint",
    "load_trained",
    "save_checkpoint",
]
