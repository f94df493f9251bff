"""What slices and exactness cost, and what they hold: every row of one table, in one command.

`python -m benchmarks.exact --out FILE` writes these keys, and under "details" what lies behind:

- `slices_over_today`: a step with as many slices as workers over a step without slices (cost).
- `eight_slices_over_plain`: a step of eight slices on two workers over torch's
  DistributedDataParallel that adds up the same micro-batches (cost).
- `exact_over_slices`: `exact=True` over that step (cost).
- `stall_s`: from a SIGKILL in mid-backward to the agreed gradient of the whole batch, five workers
  (fire); `batch_kept`: whether each of these steps had it.
- `slow_over_ideal`: one of three workers slowed three times, over the ideal of speeds (pace).
- `sentinel_share`, `guard_share`: of a step (shares).
- `shadow_stall_ms`: how long a stored State holds up the group while a shadow follows, over what
  as many steps take in the same places without one (shadow).
- `steps_lost_all_killed`: all workers of the group killed at once, with a shadow (shadow).
- `byte_equal`: runs under schedules of kills and joins, and how many ended with the quiet bytes
  (fire).
- `flips`: bits that flipped in workers' memory and results: found, and who was named (flips);
  `false_alarms` are those of quiet steps, too (guards).
- `guard`: bad gradients, and how many were found by all in their step; States that were stored with
  a number that is not finite (guards).
- `recompilations`: by torch.compile over losses and joins, a convnet and a transformer (compiled).

Of several models the worst counts. `peers` has torch's own numbers of the same runs: DDP with
accumulation, its distributed checkpoint, and torchft's recovery if it is installed.
"""
