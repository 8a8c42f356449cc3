"""Floor 4: layerfuse inside engines that have a compiler of their own. Each engine is a package, and imports that engine.

transformers, which torch.compile compiles, is a module that imports nothing of it.
"""
