package recipe

import (
	"plimsoll/recipe/strict"
)

// Recognize returns what kind of configuration a text is, and the flag of plimsoll plan for it. Both are empty for a
// text that is none; the flag is empty for a kind that plimsoll does not plan.
func Recognize(text []byte) (kind, flag string) {
	for _, parse := range []func(string, []byte) (*strict.Document, error){strict.ParseCommented, strict.Parse} {
		d, err := parse("configuration.yaml", text)
		if err != nil {
			continue
		}
		if k, _ := recognized(d.Root); k != nil {
			return k.name, k.flag
		}
	}
	return "", ""
}
