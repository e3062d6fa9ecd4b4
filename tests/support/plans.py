"""What a plan connects, counted pair by pair: from its tables, and from the batches of a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.batches import batches_of
from dilated_attention_pytorch.plan import Job, Plan


def jobs_of(plan: Plan) -> list[Job]:
    return [Job(*row) for row in plan.jobs.tolist()]


def count_pairs(plan: Plan, cuts: bool = False, scored: bool = False) -> Tensor:
    """(b, h, n, n): how often a query of a batch and head meets a key, by the tables of the plan.

    `cuts`: causal jobs need not end with the keys at their queries' own positions. `scored`: how often the
    pair is scored, whatever its multiplicity.
    """
    b, n, h, h_kv, _ = plan.shape
    counts = torch.zeros(b, h, n, n, dtype=torch.int64)
    for job in jobs_of(plan):
        queries = torch.arange(job.count) * job.step + job.start
        runs = plan.runs[job.first_run : job.first_run + job.num_runs].tolist()
        keys = torch.cat([torch.arange(count) * step + start for start, step, count, _ in runs])
        times = torch.cat([torch.full((count,), 1 if scored else times) for _, _, count, times in runs])
        seen = times.expand(job.count, -1)
        if job.causal:
            assert cuts or torch.equal(keys[-job.count :], queries)
            seen = seen * (keys <= queries[:, None])
        for i in range(job.heads):
            head = job.head + i * job.head_step
            assert head // (h // h_kv) == job.kv
            counts[job.batch, head].index_put_((queries[:, None], keys[None]), seen, accumulate=True)
    return counts


def count_batched_pairs(plan: Plan, itemsize: int) -> Tensor:
    """The same by the row numbers of the batches that are attended at a time."""
    b, n, h, h_kv, _ = plan.shape
    counts = torch.zeros(b, h, n, n, dtype=torch.int64)
    for region, batches in batches_of(plan, itemsize):
        for batch in batches:
            rows = batch.queries.numbers((n * h, h, 1)).view(*batch.queries.shape, 1)
            for keys, is_causal, _ in batch.keys:
                columns = keys.numbers((n * h_kv, h_kv, 1)).view(len(rows), 1, 1, -1)
                _assert_inside(region, rows // h, rows % h // (h // h_kv), n)
                assert (columns // h_kv // n == rows // h // n).all()
                assert (columns % h_kv == rows % h // (h // h_kv)).all()
                times = columns // h_kv % n
                seen = torch.ones(*rows.shape[:3], times.shape[-1], dtype=torch.int64)
                seen = seen.tril() if is_causal else seen
                where = torch.broadcast_tensors(rows // h // n, rows % h, rows // h % n, times)
                counts.index_put_(where, seen, accumulate=True)
    return counts


def _assert_inside(region: tuple[tuple[int, int], ...], tokens: Tensor, kv: Tensor, n: int) -> None:
    for (first, num), where in zip(region, (tokens // n, tokens % n, kv), strict=True):
        assert first <= int(where.min())
        assert int(where.max()) < first + num


def batch_sizes(plan: Plan, itemsize: int) -> list[tuple[int, int, int, int]]:
    """Of each batch: jobs, heads, query rows of a head, and the most key rows of a job at a time."""
    batches = [batch for _, each in batches_of(plan, itemsize) for batch in each]
    return [(*x.queries.shape, max(keys.rows.shape[2] for keys in x.keys)) for x in batches]
