package steptime

import (
	"strings"

	"plimsoll/internal/input/model"
)

// moduleName returns the name of the module that a parameter is the weight of.
func moduleName(p model.Parameter) string { return strings.TrimSuffix(p.Name, ".weight") }
