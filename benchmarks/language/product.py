"""What one large matrix product reaches on this device, beside which a step's FLOP/s are held."""

import json
import sys
import time

import torch

_ROUNDS = 5


def main() -> None:
    """Print FLOP/s, memory of the context, and names, as a line of JSON."""
    device = torch.device(sys.argv[1])
    torch.set_num_threads(1)
    is_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_gpu else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = time.perf_counter if is_gpu else time.process_time
    seconds = []
    for _ in range(_ROUNDS):
        began = clock()
        for _ in range(10 if is_gpu else 1):
            left @ right
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append((clock() - began) / (10 if is_gpu else 1))
    flops = 2 * size**3 / min(seconds)
    context = _context_mib() if is_gpu else 0
    what = f"{size} x {size} in {str(dtype).removeprefix('torch.')}: {flops / 1e12:.3g} TFLOP/s"
    found = {
        "flops": flops,
        "context_mib": context,
        "name": torch.cuda.get_device_name() if is_gpu else "CPU, one thread",
        "note": what + (f"; context {context} MiB" if is_gpu else ""),
    }
    print(json.dumps(found))


def _context_mib() -> int:
    """What this process took of the GPU without its tensors; nothing else may run there."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved()) // 2**20
