"""Can I use it? Features, kernels, architectures and releases in one matrix, made by asking the engine."""
