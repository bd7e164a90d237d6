package recipe

import "bytes"

// Recognize returns what kind of configuration a text is, and the flag of plimsoll plan for it. Both are empty for a
// text that is none; the flag is empty for a kind that plimsoll does not plan.
func Recognize(text []byte) (kind, flag string) {
	name := "configuration.yaml"
	if start := bytes.TrimSpace(text); bytes.HasPrefix(start, []byte{'{'}) || bytes.HasPrefix(start, []byte{'/'}) {
		name = "configuration.json"
	}
	if d := parseAny(name, text); d != nil {
		if k, _ := recognized(d.Root); k != nil {
			return k.Name, k.Flag
		}
	}
	return "", ""
}
