"""Who speaks: models, users, and the conversation between them."""
