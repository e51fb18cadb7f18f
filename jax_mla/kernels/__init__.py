"""CuTe DSL kernels. Seen by the build only; nothing here is imported at run time."""
