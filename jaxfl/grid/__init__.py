"""Many runs: comparisons of methods, and studies under several settings."""
