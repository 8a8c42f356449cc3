"""Floor 4: layerfuse inside engines that have a compiler of their own. Each engine is a package, and imports that engine."""
