"""Starts SGLang's HTTP server, on a GPU or without one, with the arguments of `python -m sglang.launch_server`.

    .venv-sglang/bin/python rlx/engine_env/sglang_serve.py --model-path DIR --device cpu ...

It adds three things and changes nothing of SGLang. None of the server's processes outlives its parent, even where that
was killed with SIGKILL. Keys come from the environment (RLX_API_KEY, RLX_ADMIN_API_KEY), where `ps` does not show them.
And with `--device cpu` two imports find something that has no CPU build: operators that torchvision's Python half
expects to be declared, and `sgl_kernel`, whose functions SGLang's CPU path names but, without AMX, does not call.

SGLang starts its processes by importing this file again, so all of it happens at import.
"""

import importlib.machinery
import os
import runpy
import signal
import sys
import threading
import time
import types

CPU, LORA, PARENT = "RLX_SERVE_CPU", "RLX_SERVE_LORA", "RLX_SERVE_PARENT"
KEYS = {"RLX_API_KEY": "--api-key", "RLX_ADMIN_API_KEY": "--admin-api-key"}
IS_MAIN = __name__ == "__main__"


def end_with_parent():
    """Watched by its pid: unlike PR_SET_PDEATHSIG it is the process that counts, not the thread that started this.

    The pid is what the parent wrote into the environment: one that is gone by now has been replaced in `getppid`. ""
    says that nobody is to be watched; processes that are started from here watch this one in any case.
    """
    said = os.environ.get(PARENT, "")
    os.environ[PARENT] = str(os.getpid())
    if not said:
        return

    def end_without_parent():
        if os.getppid() != int(said):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch():
        while True:
            end_without_parent()
            time.sleep(1.0)

    end_without_parent()  # before anything else is done
    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


def describe_to_children():
    """The environment tells the processes that are started from here what this one's arguments say."""
    arguments = sys.argv[1:]
    if "--device=cpu" in arguments or "--device cpu" in " ".join(arguments):
        os.environ[CPU] = os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if "--enable-lora" in arguments:
        os.environ[LORA] = "1"
    for variable, option in KEYS.items():
        if key := os.environ.pop(variable, ""):
            sys.argv += [option, key]


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
            raise RuntimeError(f"sgl_kernel.{name} has no CPU build; run this model on a GPU")

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
    vars(kernels).update(__version__="0.0.0", assign_req_to_token_pool_cpu=write_token_slots)
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


end_with_parent()
if IS_MAIN:
    describe_to_children()
if os.environ.get(CPU) == "1":
    import torch

    if torch.version.cuda is None:  # beside a CUDA build torchvision brings its own
        TORCHVISION = declare_torchvision_operators()
    provide_sgl_kernel()
    if os.environ.get(LORA) == "1":
        without_pinned_memory()

if IS_MAIN:
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
