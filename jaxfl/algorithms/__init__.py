"""The methods, a file each, in a folder for each mechanism. What is here is found, see `jaxfl.registry`."""
