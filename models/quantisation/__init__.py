"""Quantised checkpoints as they are published: what `quantization_config` says of them, and how the
arrays of each method are read into `jaxshare.quantised.QuantisedTensor`."""
