"""dcpc inside Hugging Face's Trainer: `class MyTrainer(dcpc.hf.TrainerMixin, Trainer)`."""

from dcpc.hf.trainer import TrainerMixin

__all__ = ["TrainerMixin"]
