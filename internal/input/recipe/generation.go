package recipe

import "plimsoll/internal/input/rollout"

// Generation says how a program trains on answers that the model itself generates, as GRPO does.
type Generation struct {
	Engine *rollout.Engine
	// Reference says that a frozen model judges the answers: the trained model as it was loaded.
	Reference bool
	// Companions are the other models on the GPUs of the policy.
	Companions []Companion
	// LeftOut names what the job has beside what is planned, such as models on other GPUs. A verdict stands beside it.
	LeftOut []string
}
