"""Heavy hitters: measure the attention that stored tokens get."""
