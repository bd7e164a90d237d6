package fit

// Argument is an argument of Megatron-LM that a recipe changes.
type Argument struct {
	Name     string `json:"name"`
	From, To string
}
