module plimsoll/experiments

go 1.26.0

require (
	golang.org/x/sys v0.49.0
	pgregory.net/rapid v1.3.0
	plimsoll v0.0.0
)

require (
	github.com/google/renameio/v2 v2.0.2 // indirect
	golang.org/x/tools v0.52.0 // indirect
	k8s.io/utils v0.0.0-20261023123148-ca04ba58ecab // indirect
)

replace plimsoll => ../
