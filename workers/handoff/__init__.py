"""What a rank gives to the same rank of another replica: KV of requests that move, and weights."""
