"""The methods, one file each, in one folder per mechanism; `jaxfl.registry` finds them."""
