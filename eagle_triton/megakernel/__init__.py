"""Everything between the target's logits and the next draft tree in one launch. engine/megakernel_step.py binds it."""
