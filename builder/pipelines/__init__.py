"""The engines of a diffusers pipeline: its folder, the options of each component, the build."""
