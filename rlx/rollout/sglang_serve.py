"""Starts SGLang's HTTP server on a machine without a GPU: the same arguments as `python -m sglang.launch_server`.

    .venv-sglang/bin/python rlx/rollout/sglang_serve.py --model-path DIR --device cpu ...

A script for the engine's own environment (Python 3.11, torch), never imported by rlx. Nothing of SGLang is changed. Two
of its imports find something to import here that has no CPU build: two operators that torchvision's Python half expects
to be declared, and `sgl_kernel`, whose functions SGLang's CPU path names but calls none of where the CPU has no AMX.
SGLang starts its processes by importing this file again, so all of it happens at import.
"""

import importlib.machinery
import os
import runpy
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch

_LORA = "RLX_SERVE_LORA"


def declare_torchvision_operators():
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class CpuKernels(types.ModuleType):
    """In place of sgl_kernel: every function exists, and says when it is called that it does not."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args, **kwargs):
            raise NotImplementedError(f"sgl_kernel.{name} has no CPU build; run this model on a GPU")

        return absent


def write_token_slots(request_indices, request_to_token, starts, ends, slots, slots_length):
    """What SGLang's CPU path does call: gives each request's new tokens their cache slots."""
    at = 0
    for index, start, end in zip(request_indices.tolist(), starts.tolist(), ends.tolist()):
        count = end - start
        request_to_token[index, start:end] = slots[at : at + count].to(request_to_token.dtype)
        at += count


def provide_sgl_kernel():
    kernels = CpuKernels("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    kernels.__version__ = "0.0.0"
    kernels.assign_req_to_token_pool_cpu = write_token_slots
    sys.modules.setdefault("sgl_kernel", kernels)


def without_pinned_memory():
    """SGLang's LoRA code asks for pinned host memory, which torch refuses where there is no accelerator."""

    def unpinned(function):
        def call(*args, pin_memory=False, **kwargs):
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


TORCHVISION = declare_torchvision_operators()
provide_sgl_kernel()
if __name__ == "__main__" and "--enable-lora" in sys.argv:
    os.environ[_LORA] = "1"
if os.environ.get(_LORA) == "1":
    without_pinned_memory()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
