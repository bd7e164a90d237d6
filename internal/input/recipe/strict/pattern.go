package strict

import (
	"fmt"
	"regexp"
	"strings"

	"plimsoll/internal/base/fault"
)

// Pattern compiles a Python regular expression between two others. The offset
// is its place in the file.
func (r *Reader) Pattern(key string, at int64, before, expression, after string) (*regexp.Regexp, error) {
	if strings.Contains(expression, "{,") {
		return nil, r.Inputf(at, "%s has %q, but Python and Go read {, differently", key, expression).
			WithHint("write {0,")
	}
	_, err := regexp.Compile(expression)
	if err == nil {
		var compiled *regexp.Regexp
		if compiled, err = regexp.Compile(before + "(?:" + expression + ")" + after); err == nil {
			return compiled, nil
		}
	}
	return nil, &fault.Input{
		Where: r.Position(at),
		What:  fmt.Sprintf("%s has %q, a pattern that plimsoll cannot read", key, expression),
		Err:   err,
		Hint:  "check the brackets; lookaround and references to groups are not supported: list the modules instead",
	}
}
