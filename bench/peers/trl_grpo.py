"""TRL's GRPO on the work of `work.py`, step by step on command: `python bench/peers/trl_grpo.py MODEL`.

What runs is `GRPOTrainer.train` with transformers' own generation; a callback at the end of each step waits for the
command. Choices made for it: one forward and backward pass for all 64 sequences, float32 (its default is bfloat16), no
gradient checkpointing (its default is on), nothing logged to services, nothing saved, one torch thread a core. Its
tokenizer has the end of text and the padding behind the vocabulary.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import work
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = 4096  # of the data set; it begins anew after them


class Steps(TrainerCallback):
    """Answers at the end of a step and waits for the next command."""

    def __init__(self, channel: work.Channel) -> None:
        self._channel = channel
        self.counts: dict[str, float] = {}

    def on_step_end(self, args, state, control, **_):
        self._channel.say(**self.counts)
        control.should_training_stop = not self._channel.step_is_wanted()


class CountingTrainer(GRPOTrainer):
    """Notes what the update is given."""

    def __init__(self, steps: Steps, **arguments) -> None:
        self._steps = steps
        super().__init__(callbacks=[steps], **arguments)

    def _compute_loss(self, model, inputs):
        self._steps.counts = {
            "generated": inputs["completion_ids"].numel(),
            "trained": int(inputs["completion_mask"].sum()),
            "advantage": float(inputs["advantages"].abs().mean()),
        }
        return super()._compute_loss(model, inputs)


def rewards(completions: list[str], **_) -> list[float]:
    return [work.share_of_even(text) for text in completions]


def make_config(directory: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=work.SEQUENCES,
        num_generations=work.SAMPLES,
        max_completion_length=work.NEW_TOKENS,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        learning_rate=work.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=work.BETAS[0],
        adam_beta2=work.BETAS[1],
        adam_epsilon=work.EPSILON,
        max_grad_norm=work.CLIP_NORM,
        max_steps=10**9,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def matrix_product():
    square = torch.ones(work.MATRIX, work.MATRIX)
    return lambda: square @ square


def main() -> None:
    channel = work.Channel(matrix_product)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=os.path.join(path, "tokenizer.json"), eos_token="<end>", pad_token="<pad>", padding_side="left"
    )
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    if ends != (work.END, work.PAD):
        raise ValueError(f"end of text and padding are ids {ends}, not those behind the vocabulary")
    steps = Steps(channel)
    with tempfile.TemporaryDirectory() as directory:
        trainer = CountingTrainer(
            steps,
            model=model,
            reward_funcs=rewards,
            args=make_config(directory),
            train_dataset=Dataset.from_dict({"prompt": [work.question(i) for i in range(PROMPTS)]}),
            processing_class=tokenizer,
        )
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
        channel.say(parameters=sum(p.numel() for p in trained), dtypes=dtypes)
        if channel.step_is_wanted():
            trainer.train()


if __name__ == "__main__":
    main()
