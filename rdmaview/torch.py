"""The device memory of PyTorch's allocator, for `SegmentTable.sync`. PyTorch is needed."""


def cuda_segments(device=None):
    """Find the segments that PyTorch's CUDA allocator has.

    Of what it gave back to the driver, other memory may lie at the same address
    afterwards. So after a device's memory was released, by ``empty_cache`` or for want
    of it, all segments of that device count as other ones, and are registered anew.
    Expandable segments that only grew are told as grown.

    Parameters
    ----------
    device : int, optional
        Index of the device. Default: all of them.

    Returns
    -------
    list of tuple
        ``(addr, size, "cuda:0", released)`` of each; `released` is how many bytes its
        device has given back. Empty if CUDA isn't in use yet.

    Raises
    ------
    ImportError
        PyTorch is not installed.
    """
    import torch

    if not torch.cuda.is_initialized():
        return []
    # Asked first: what is released in between makes the next scan's segments others.
    released = [
        torch.cuda.memory_stats(index)["reserved_bytes.all.freed"]
        for index in range(torch.cuda.device_count())
    ]
    return [
        (
            segment["address"],
            segment["total_size"],
            f"cuda:{segment['device']}",
            released[segment["device"]],
        )
        for segment in torch.cuda.memory_snapshot()
        if device is None or segment["device"] == device
    ]
