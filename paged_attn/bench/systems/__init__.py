"""The systems that can be measured, one file each, and what they are told and say."""
