"""What a run is made of: its data, its rounds one after another, and its folder, begun or reopened."""
