package filestest

import "strings"

// Cases returns the texts of a table with what is expected of each: behind an arrow, or on the next line with four
// spaces before it. A line of a text ends at \n.
func Cases(table string) map[string]string {
	list := map[string]string{}
	before := ""
	for line := range strings.Lines(strings.TrimSpace(table)) {
		line = strings.TrimRight(line, "\n")
		script, want, one := strings.Cut(line, "  ->  ")
		switch {
		case one:
			list[strings.ReplaceAll(script, `\n`, "\n")] = want
		case strings.HasPrefix(line, "    "):
			list[strings.ReplaceAll(before, `\n`, "\n")] = strings.TrimSpace(line)
		}
		before = line
	}
	return list
}
