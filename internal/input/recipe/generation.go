package recipe

import "plimsoll/internal/input/rollout"

// Generation says how a program trains on answers that the model itself generates, as GRPO does.
type Generation struct {
	Engine *rollout.Engine
	// Reference says that a frozen model judges the answers: the trained model as it was loaded.
	Reference bool
}
