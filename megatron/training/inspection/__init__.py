"""What a run says about itself: its settings for people, its description in a checkpoint."""
