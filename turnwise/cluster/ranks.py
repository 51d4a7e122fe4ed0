"""Numbers of ranks."""

from turnwise.errors import WorkerError


def require_rank(role: str, size: int, rank: int) -> None:
    """Raises WorkerError if a role of `size` ranks has no such rank."""
    if not 0 <= rank < size:
        last = size - 1
        raise WorkerError(f"{role} has no rank {rank}: its ranks are numbered from 0 to {last}")
