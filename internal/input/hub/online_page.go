//go:build page

package hub

import "plimsoll/internal/base/fault"

// get asks nobody: the planner in a page sends nothing.
func get(name string) ([]byte, error) {
	return nil, fault.Inputf("the hub was not asked for %s: this page sends nothing", name).
		WithHint("leave --online out, and give the model's config.json as a file")
}
