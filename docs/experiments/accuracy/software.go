package main

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// release is when a version came out.
type release struct{ month, version string }

var torchReleases = []release{
	{"2021-10", "1.10.0"}, {"2022-03", "1.11.0"}, {"2022-06", "1.12.0"}, {"2022-10", "1.13.0"}, {"2023-03", "2.0.0"}, {"2023-10", "2.1.0"}, {"2024-01", "2.2.0"},
	{"2024-04", "2.3.0"}, {"2024-07", "2.4.0"}, {"2024-10", "2.5.0"}, {"2025-01", "2.6.0"}, {"2025-04", "2.7.0"}, {"2025-08", "2.8.0"}, {"2025-10", "2.9.0"}, {"2026-01", "2.10.0"},
}

var transformersReleases = []release{
	{"2022-01", "4.16.0"}, {"2022-12", "4.25.0"}, {"2023-04", "4.28.0"}, {"2023-06", "4.30.0"}, {"2023-10", "4.34.0"}, {"2023-12", "4.36.0"},
	{"2024-03", "4.39.0"}, {"2024-08", "4.44.0"}, {"2024-10", "4.46.0"}, {"2025-03", "4.50.0"}, {"2025-10", "4.57.0"},
}

// version is the version of a program that the text names, or the newest of
// the time that it names. It is empty where the text says nothing of either.
func (t text) version(program string, releases []release) string {
	if v := t.find(`\b(?:` + program + `) ~?v?(\d+\.\d+(?:\.\d+)?)`); v != "" {
		return v
	}
	if v := t.find(`\b(?:` + program + `) ~?v?(\d+\.\d)x`); v != "" {
		return v + "0"
	}
	at, ok := t.date()
	if !ok {
		return ""
	}
	version := ""
	for i, r := range releases {
		if r.month > at {
			break
		}
		version = r.version
		if t.has("nightly") && i+1 < len(releases) {
			version = releases[i+1].version // which it became
		}
	}
	return version
}

var (
	isoDate   = regexp.MustCompile(`\b(20\d\d-\d\d)`)
	monthYear = regexp.MustCompile(`\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*(?:/[A-Z][a-z]+)? (20\d\d)`)
	onlyYear  = regexp.MustCompile(`\b(20\d\d)\b`)
)

// date is the month that a text names, as 2023-06; the middle of a year that it
// names alone.
func (t text) date() (string, bool) {
	s := string(t)
	if m := isoDate.FindStringSubmatch(s); m != nil {
		return m[1], true
	}
	if m := monthYear.FindStringSubmatch(s); m != nil {
		month, err := time.Parse("Jan 2006", m[1]+" "+m[2])
		return month.Format("2006-01"), err == nil
	}
	if m := onlyYear.FindStringSubmatch(strings.ReplaceAll(s, ",", " ")); m != nil {
		return fmt.Sprintf("%s-06", m[1]), true
	}
	return "", false
}
