"""What one GPU can show of elastix beside torch, in one command.

`python -m benchmarks.gpu --out FILE` writes a key for each part, and "device" with its name and the
versions of driver, torch, CUDA, cuDNN and NCCL. Each part runs in a process of its own. What one
raises stands under "failed", and the others are measured nevertheless; the exit status is 1 then.

- `overhead`: a step of plain torch, of torch's DDP in a world of one (NCCL), and of elastix with
  one worker, the same model on the same GPU, in turn: a convnet in channels_last, and a transformer
  that is compiled (as one graph under DDP, too), both in bfloat16 autocast. Plain torch over itself
  is the noise. `host_s` is how long the training thread takes over a step.
- `stall`: what a checkpoint of a State of 5 GB on the GPU costs training, elastix beside
  torch's distributed checkpoint with asynchronous staging: how long the training thread is held up,
  how much longer the step takes, and what the GPU holds more at the peak.
- `read`: a model from the store straight to the device, in GB/s, beside torch.load(mmap=True) and
  safetensors; and bare copies from ordinary and from pinned memory, which are the limits.
- `packing`: trials an hour of a campaign whose trials train a small model, so many at a time on
  the one GPU; in processes that stay, without Ray.
- `estimate`: what a step of the two models (not compiled) takes, beside what `elastix estimate`
  says: memory at the peak, measured over estimated, and time, estimated over measured.
"""
