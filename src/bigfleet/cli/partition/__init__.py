"""`bigfleet partition`: partitioned hosts as a picture, and orders of placement side by side."""
