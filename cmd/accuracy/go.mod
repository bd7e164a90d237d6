module plimsoll/cmd/accuracy

go 1.26.0

require (
	github.com/jedib0t/go-pretty/v6 v6.8.3
	plimsoll v0.0.0
)

require (
	github.com/clipperhouse/uax29/v2 v2.7.0 // indirect
	github.com/go-json-experiment/json v1.27.2 // indirect
	github.com/google/renameio/v2 v2.0.2 // indirect
	github.com/mattn/go-runewidth v0.0.30 // indirect
	github.com/pelletier/go-toml/v2 v2.4.3 // indirect
	github.com/tidwall/btree v1.8.2 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
	k8s.io/utils v0.0.0-20261023123148-ca04ba58ecab // indirect
	mvdan.cc/sh/v3 v3.14.1 // indirect
)

replace plimsoll => ../..
