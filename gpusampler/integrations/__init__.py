"""Adapters to training frameworks, one module each; a module needs its framework, this package and gpusampler do not.

`accelerate` prepares loaders without cutting the plan, `transformers` makes a Trainer train on balanced micro-batches,
`lightning` makes loaders for a Lightning Trainer, `torchdata` checks the resume of a StatefulDataLoader, `deepspeed`
fills in a DeepSpeed configuration. docs/integrations.md shows each of them.
"""
