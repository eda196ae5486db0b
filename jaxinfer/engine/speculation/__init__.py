"""The policy of speculation: whether the next step verifies drafts, and how many of each request."""
