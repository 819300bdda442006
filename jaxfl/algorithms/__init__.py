"""The methods, one file each; `partial_sharing` is the mechanism that most of them share."""
