"""Training of the two small models: `Trainer(CharGPT(CharGPTConfig(steps=200))).fit()`."""

from transformer_kernels.training.char_gpt import CharGPT
from transformer_kernels.training.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from transformer_kernels.training.config import CharGPTConfig, ImdbConfig, TrainingConfig
from transformer_kernels.training.distributed import Processes, joined_processes
from transformer_kernels.training.files import DataFileError
from transformer_kernels.training.generation import Sampling, generate
from transformer_kernels.training.imdb import Imdb
from transformer_kernels.training.recipes import load_trained
from transformer_kernels.training.stopping import Interrupted, TrainingDiverged
from transformer_kernels.training.trainer import Result, Trainer

__all__ = [
    "CharGPT",
    "CharGPTConfig",
    "Checkpoint",
    "CheckpointError",
    "DataFileError",
    "Imdb",
    "ImdbConfig",
    "Interrupted",
    "Processes",
    "Result",
    "Sampling",
    "Trainer",
    "TrainingConfig",
    "TrainingDiverged",
    "generate",
    "joined_processes",
    "load_checkpoint",
    "load_trained",
    "save_checkpoint",
]
